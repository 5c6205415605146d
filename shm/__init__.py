"""Where tensor bytes live: datatypes, regions, arenas. Imports nothing of the other packages."""
