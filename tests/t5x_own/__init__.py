"""T5X's own tests, with the losses and models of this package in place of T5X's."""
