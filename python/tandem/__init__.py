"""Tandem: MiniMax-M3 with its drafter, served from one cache."""
