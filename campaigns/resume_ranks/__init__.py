"""N steps on some ranks, M more on as many or on others: the state that was saved, and the data in the same order."""
