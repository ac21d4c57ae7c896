"""MONAI bundles as tasks: declarations of MONAI's components are built from an allow list, and no code is run."""
