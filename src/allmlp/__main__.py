"""python -m allmlp"""

from allmlp.cli import main

if __name__ == "__main__":
    main()
