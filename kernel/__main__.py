"""`python -m kernel`."""

from kernel.command.main import main

if __name__ == "__main__":
    main()
