"""What every long-lived process of ours needs: wire, service, and how parts are looked at."""

__version__ = "0.1.0"
