"""The floor: settings, chip facts, the patch ledger, the report behind ``doctor``. Imports no torch."""
