# %% [markdown]
# # Swap the LLM in a LangChain chain
# A RAG chain puts retrieved documents in front of a question, and the model reads them again every time.
# `ChatKVBoost` is a LangChain chat model that keeps what it has read: the documents are read once, when they are
# ingested. Afterwards they may come in any order and behind any preamble, and only the rest is computed.
#
# `pip install 'kvboost-rag[langchain,plots]'`. Runs for about two minutes on two CPU cores.

# %% [markdown]
# ## The chain that you have
# Documents, a vector store, a prompt. (Any embeddings will do. These look at words only, so that nothing has to be
# downloaded.)

# %%
import random

import matplotlib.pyplot as plt
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

import shared


class WordEmbeddings(Embeddings):
    def embed_documents(self, texts):
        return [shared.word_vector(text) for text in texts]

    def embed_query(self, text):
        return shared.word_vector(text)


passages = shared.passages(12)
store = InMemoryVectorStore(WordEmbeddings())
store.add_documents([Document(text, id=subject) for subject, text in passages.items()])
prompt = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context only."), ("human", "Context:\n\n{context}\n\nQuestion: {question}")]
)


def chain_with(llm, documents):
    """The usual chain. Rankings change from question to question; here a shuffle stands for that."""
    retriever = store.as_retriever(search_kwargs={"k": documents})

    def context(question):
        found = retriever.invoke(question)
        random.Random(question).shuffle(found)
        return "\n\n".join(document.page_content for document in found)

    return {"context": context, "question": RunnablePassthrough()} | prompt | llm


# %% [markdown]
# ## The line that changes
# Before, it was something like
# `llm = ChatHuggingFace(llm=HuggingFacePipeline.from_model_id(model_id, task="text-generation"))`.

# %%
from langchain_kvboost import ChatKVBoost, stored_documents, warm_documents

llm = ChatKVBoost(model=shared.model(), max_tokens=32)

# %% [markdown]
# ## Once, when documents are ingested
# Each is read in three orders, beside changing neighbours. That costs time now, and makes later answers truer.

# %%
report = warm_documents(llm.get_engine(), stored_documents(store))
print(f"{report.tokens} tokens of {report.computed} documents read in {report.seconds:.0f} s")

# %% [markdown]
# ## Ask
# `cache_read` is how many of the prompt's tokens did not have to be computed.

# %%
chain = chain_with(llm, documents=4)
for question in ("What does the break statement do?", "What happens when an assertion fails?"):
    answer = chain.invoke(question)
    print(f"{question}\n  {answer.content.strip()}\n  {answer.usage_metadata}")

# %% [markdown]
# ## Picture: time to the first token against number of documents
# Three times the same prompts. `reuse="off"` computes everything, as plain Hugging Face does. `reuse="exact"` is what
# a prefix cache gives: it helps only as long as a prompt begins like an earlier one. The default also moves documents.

# %%
counts = (1, 2, 4, 6, 8)
modes = {"approximate": "documents at any place (the default)", "exact": "exact prefix only", "off": "full recompute"}
seconds = {mode: [] for mode in modes}
for count in counts:
    for mode in modes:
        message = chain_with(llm.bind(reuse=mode), count).invoke(f"How do {count} kinds of statement differ?")
        seconds[mode].append(message.response_metadata["ttft_s"])
    print(count, {mode: f"{times[-1]:.2f} s" for mode, times in seconds.items()})

# %%
figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
for (mode, label), style in zip(modes.items(), ("#047857 o -", "#1d4ed8 s --", "#6b7280 v :"), strict=True):
    colour, marker, line = style.split()
    axes.plot(counts, seconds[mode], color=colour, marker=marker, linestyle=line, label=label)
axes.set(xlabel="documents in the prompt, about 200 tokens each", ylabel="time to the first token, s", xticks=counts)
axes.set_ylim(bottom=0)
axes.set_title("The same chain, one prompt for each number of documents")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
shared.save(figure, "langchain_swap.png")
