"""Evaluations: questions with known answers, the shares that were answered rightly, and damage to show they notice."""
