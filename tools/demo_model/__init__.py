"""How the demo model is made: data, training, export and evaluation. `README.md` beside this says how to run it."""
