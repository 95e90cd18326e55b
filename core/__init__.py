"""The ground floor: contracts of ops and kernels, devices, profiles, files and what is printed."""
