"""The bytes of files: as they are uploaded, kept, read into rows, and written from rows."""
