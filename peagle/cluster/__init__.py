"""The service of peagle.serve over several processes: an application of Ray Serve."""
