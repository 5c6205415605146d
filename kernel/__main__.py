"""`python -m kernel`."""

from kernel.tools.main import main

if __name__ == "__main__":
    main()
