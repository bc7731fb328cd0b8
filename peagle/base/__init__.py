"""What every package needs that is no array operator: errors, files, settings. Imports nothing of ours."""
