"""From turns to a loss: arithmetic, checkable with pencil and paper."""
