"""What every part of the workbench stands on: files, options, what is printed, recipes."""
