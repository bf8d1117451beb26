"""What a run did, as a page for people: from the record that it leaves in its output directory."""
