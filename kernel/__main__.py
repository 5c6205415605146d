"""`python -m kernel`."""

from kernel.command.cli import main

if __name__ == "__main__":
    main()
