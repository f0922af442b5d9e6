"""Text that the calibration at load is measured on: short passages and questions, written for this purpose."""

from __future__ import annotations

PASSAGES = (
    """Bread oven, booking rules

The village oven is heated every second Saturday. Families who want to bake write their name on the list at the mill
before Thursday evening and say how many loaves they will bring. Each family may bake up to nine loaves; the wood is
paid from the common fund, but whoever comes without having booked pays three crowns for every loaf. The first batch
goes in at seven, when the stones are hottest, and is kept for rye.""",
    """Ferry to the north island

From April to October the ferry leaves the stone quay at 8:10, 12:40 and 17:20 and needs thirty-five minutes for the
crossing. In winter only the 12:40 sails, and not when the wind is above force seven. Bicycles travel free, dogs must
be on a lead, and cars are carried only on Mondays. The last boat back leaves the island at 18:15.""",
    """function parse_window(text, default)

Reads a time window such as "08:00-16:30" and returns the pair of minutes since midnight. If the text is empty the
default is returned unchanged. A window that ends before it starts runs past midnight, so 1440 is added to its end.
Raises ValueError when a part is not a time of day; the message names the part. Seconds are not accepted.""",
    """Minutes of the garden club, third of March

Present were eleven members. The treasurer reported a balance of 412 crowns after the purchase of two compost bins. It
was agreed to move the plum trees to the south wall before the end of the month, and to ask the school whether pupils
want to look after the bean rows. Mrs Halvorsen offered to keep the seed list; the next meeting is on the seventh of
April.""",
)
QUESTIONS = (
    "What does somebody pay who bakes without having booked, and how many loaves may a family bake?",
    "When does the last boat leave the island, and on which days are cars carried?",
)
PROMPT = "Context:\n\n{context}\n\nQuestion: {question}\nAnswer:"
ORDERS = ((2, 0, 3, 1), (1, 3, 0, 2))
