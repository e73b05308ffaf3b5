"""The model as training sees it: how it is built, what is refused, and how it is called as a pure function."""
