"""T5X's models beside ours, live."""
