"""`kvboost-rag demo`: a folder of documents, a FAISS index, an ordinary chain, and a comparison with full prefill."""
