"""Native code that releases the GIL runs in parallel in threads of one replica.

    ingress run app_examples.numpy_deployment:app

    curl http://127.0.0.1:8000/ | head -c 60    [[-0.1,...],...]

The array is sent as JSON: 100 rows of 100 numbers.
"""

import asyncio

import ingress as serve


@serve.deployment
class NumpyDeployment:
    def _heavy_numpy(self, array):
        import numpy as np

        # Many NumPy ops release the GIL while executing C/Fortran code.
        return np.linalg.svd(array)[0]

    async def __call__(self, request):
        import numpy as np

        # Create a sample array from request data
        array = np.random.rand(100, 100)
        # ✅ Multiple threads can run _heavy_numpy in parallel if
        # the underlying implementation releases the GIL.
        return await asyncio.to_thread(self._heavy_numpy, array)


app = NumpyDeployment.bind()
