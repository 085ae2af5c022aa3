"""``python -m legato_deploy`` is ``legato``."""

from .cli import main

if __name__ == "__main__":
    main()
