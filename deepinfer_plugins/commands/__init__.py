"""One module per sub-command of ``deepinfer-plugins``, imported when it is called."""
