"""Entry point of `python -m meshwright`: the command line."""

from meshwright.runtime.cli.main import main

if __name__ == "__main__":
    main()
