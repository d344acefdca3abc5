"""The step loop, sampling and the LLM class."""
