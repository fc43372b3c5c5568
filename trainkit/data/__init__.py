"""Rows of data and how they become token ids, without torch: files, formats, chats, prepared data, packing."""
