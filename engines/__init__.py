"""Engine bundles, the backends that execute them and the runtime that serves them."""

from kiln_launcher import check_packages

check_packages()
