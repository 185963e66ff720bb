"""Recipes, runs, where they are kept and where they are executed."""
