"""The step: boundary, reduction, commit or roll-back."""
