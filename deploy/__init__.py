"""What an operator deploys: compose file, Prometheus, Grafana. Nothing of it is installed with the package."""
