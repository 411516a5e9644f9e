"""Models that the engine is exercised on, and what a user's own must offer."""
