# %% [markdown]
# # Swap the LLM in LlamaIndex
# `KVBoost` is a LlamaIndex LLM that keeps what it has read. An index on a `KVBoostVectorStore` has each node read once,
# when it is inserted; query engines stay as they are, and the nodes are found again in any prompt that holds them.
#
# `pip install 'kvboost-rag[llama-index,plots]'`. Runs for about a minute on two CPU cores.

# %% [markdown]
# ## The line that changes
# `configure_settings` sets `Settings.llm` together with the tokenizer that LlamaIndex counts with.

# %%
import matplotlib.pyplot as plt
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.vector_stores import SimpleVectorStore

import shared
from llama_index.llms.kvboost import KVBoost, KVBoostVectorStore, configure_settings

llm = configure_settings(KVBoost(model=shared.model(), max_new_tokens=32))

# %% [markdown]
# ## Documents are read when they are inserted
# The store is LlamaIndex's own, wrapped. (Any embeddings will do. These look at words only, so that nothing has to be
# downloaded.)


# %%
class WordEmbeddings(BaseEmbedding):
    def _get_text_embedding(self, text):
        return shared.word_vector(text)

    def _get_query_embedding(self, query):
        return shared.word_vector(query)

    async def _aget_query_embedding(self, query):
        return shared.word_vector(query)


documents = [Document(text=text, doc_id=subject) for subject, text in shared.passages(12).items()]
store = KVBoostVectorStore(SimpleVectorStore(), llm.get_engine())
index = VectorStoreIndex.from_documents(
    documents, storage_context=StorageContext.from_defaults(vector_store=store), embed_model=WordEmbeddings()
)
print(f"{llm.get_engine().stats().chunks} chunks stored")

# %% [markdown]
# ## Ask
# Query engines give the text of an answer only. What was reused is the difference of the engine's sums.

# %%
queries = index.as_query_engine(similarity_top_k=4)  # response_mode="compact", as always
fields = ("prompt_tokens", "exact_tokens", "approximate_tokens", "repaired_tokens")
questions = (
    "What does the break statement do?",
    "When is the else clause of a loop executed?",
    "Which exceptions does a raise statement take?",
    "How is a function defined?",
    "How is a function defined?",
)
usages = []
for question in questions:
    before = llm.get_engine().stats()
    answer = queries.query(question)
    after = llm.get_engine().stats()
    usages.append({field: getattr(after, field) - getattr(before, field) for field in fields})
    print(f"{question}\n  {str(answer).strip()}\n  {usages[-1]}")

# %% [markdown]
# ## Picture: tokens by kind of hit, for each request
# The nodes were read before any question was asked, so they are moved into place, and only their first tokens are
# repaired. LlamaIndex's own instructions are new at first. The last question is the one before once more: such a prompt
# is taken as it was served.

# %%
figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
shared.draw_kinds(axes, [f"question {n}" for n in range(1, len(usages))] + ["the same\nagain"], usages)
axes.set_title("Four nodes out of twelve in each prompt, LlamaIndex's default layout")
shared.save(figure, "llama_index_swap.png")
