"""`python -m kernel`."""

from kernel.cli import main

if __name__ == "__main__":
    main()
