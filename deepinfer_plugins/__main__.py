"""``python -m deepinfer_plugins``: the command ``deepinfer-plugins`` of this interpreter's environment."""

from deepinfer_plugins.cli import main

if __name__ == "__main__":
    main()
