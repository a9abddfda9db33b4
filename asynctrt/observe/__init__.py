"""Observe the engines of an application: metrics for Prometheus, spans for OpenTelemetry."""
