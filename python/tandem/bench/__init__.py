"""Measurements that compare the engine with something else in one run."""
