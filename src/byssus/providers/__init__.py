"""Models to talk to. Each file is one provider; none is imported before it is used."""
