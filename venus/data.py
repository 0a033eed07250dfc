"""SFT rows and question sets: python -m venus.data stats|questions (`curation.formats`)."""

from venus.curation.formats import main

if __name__ == "__main__":
    main()
