"""Forward-mode losses for T5X models, and analysis runs that need them."""

__version__ = "0.1.0"
