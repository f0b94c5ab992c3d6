"""Token data: text of any size -> shuffled token files with a manifest -> training windows."""
