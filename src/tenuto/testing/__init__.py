"""What tests of Tenuto and of its extensions share: shipped suites, recorded and simulated file systems, faults."""
