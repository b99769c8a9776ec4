"""Values that every room knows: they carry no connection, and import nothing above them."""
