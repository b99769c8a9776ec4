"""byssus in the clothes of other libraries. Each file is one library; none is imported before it is used."""
