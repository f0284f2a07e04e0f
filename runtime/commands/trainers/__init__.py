"""The command line of other trainers: importing configurations, planning for them, exporting plans."""
