"""What developers of Penstock run; no part of the package that users install."""
