"""`python -m fedcb2o` is the command `fedcb2o`."""

from fedcb2o.cli import main

if __name__ == "__main__":
    main()
