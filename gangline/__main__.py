"""Run `python -m gangline` as the `gangline` command."""

from gangline.cli.main import main

if __name__ == "__main__":
    main()
