"""What the type checker must know of T5X, which not every machine has.

Names and parameters that this package uses; everything else is `Any`. The checker reads
these files whether T5X is installed or not, so it finds the same on every machine; the
interpreter never sees them. A test compares them with T5X where it is installed.
"""

from typing import Any

__file__: str

def __getattr__(name: str) -> Any: ...
