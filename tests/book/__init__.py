"""An oracle of restarts that shares no idea with the library, and histories that it judges (`book.py`)."""
