"""`python -m bagua_launch` is `bagua-launch`."""

from bagua_launch.main import main

if __name__ == "__main__":
    main()
