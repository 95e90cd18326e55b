"""What every part of the workbench stands on: reading and writing files."""
