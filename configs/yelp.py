"""DLRM on the Yelp open dataset: is a review above 4 stars? About 7 million reviews; the latest tenth is test.

    recjax data prepare yelp --from FOLDER --out prepared/yelp
    recjax train yelp data.path=prepared/yelp

FOLDER holds yelp_academic_dataset_business.json, yelp_academic_dataset_user.json and yelp_academic_dataset_review.json,
plain or with .gz after their names (business.yelp.com/data/resources/open-dataset; its terms do not let recjax ship a
row). Every feature was known before the review: stars and counts of a business or user, as the files give them, are
computed over all reviews, the one to predict included, and are not used. `order=business` groups the rows by business.

Not measured on the full data here: no copy is at hand. The settings are those of the other ratings, and were only seen
to train on generated files of this format.
"""

from recjax.config.run import EmbeddingConfig, RunConfig
from recjax.config.small_data import SmallData
from recjax.config.train import DenseAdagrad, TrainConfig
from recjax.data.datasets.yelp import Yelp
from recjax.embedding.optim import RowWiseAdagrad
from recjax.models.dlrm import DLRMConfig

config = RunConfig(
    data=Yelp(),
    model=DLRMConfig(bottom=(64, 16), top=(256, 128, 1)),
    embedding=EmbeddingConfig(dim=16, optimizer=RowWiseAdagrad(learning_rate=0.02)),
    train=TrainConfig(batch_size=2048, optimizer=DenseAdagrad(0.02), eval_every=500, patience=3),
    small=SmallData(below_rows=500_000),
)
